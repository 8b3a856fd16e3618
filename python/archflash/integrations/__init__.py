"""archflash inside other libraries. Each module imports the library that it is for, and is imported
only by who wants it.
"""

"""`archflash calibrate` and `archflash bench`: what is measured (grid), who can be measured
(candidates), how (lab), in which process (measuring), and what a table is made of (fit).
"""

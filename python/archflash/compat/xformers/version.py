"""The version of xformers whose interface this is."""

__version__ = "0.0.35"

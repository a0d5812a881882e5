"""The version, in a module of its own so that building needs no import of the package."""

__version__ = "0.1.0"

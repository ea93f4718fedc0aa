"""Rules of a conversion, with one file for each kind of code."""

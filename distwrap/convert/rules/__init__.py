"""Rules of a conversion, a file for each kind of code that they know."""

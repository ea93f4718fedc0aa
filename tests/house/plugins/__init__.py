"""Files that other packages could have, one for each kind of thing that can be added to distwrap."""

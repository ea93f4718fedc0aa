"""The folder in which this process was when it imported distwrap: a script may go elsewhere before its first launch."""

import os

FOLDER = os.getcwd()

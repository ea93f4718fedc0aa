"""Ranks that are threads of one process, and take turns: a distributed program in one debugger, in one fixed order."""

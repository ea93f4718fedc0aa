"""The fixed point: programs as users wrote them at one commit, and what each of them gave there on two ranks.

`make corpus` runs them again with the code as it is now, and prints what differs. Where something was taken away on
purpose, its programs stand in went.json; any other difference is an error, but for programs whose record says that they
were not right there: what those give is printed, since it is hoped to change.

    programs/        the programs as they stood then: never edited, whatever the documentation says today
    programs.json    the commands of those that are not run by `python NAME`, and what was left out, with the reason
    recorded.json    what each gave: exit code, class of the error, and the lines that it printed
    went.json        the beginnings of the names of programs that differ on purpose, and what the user writes now
"""

"""Starting the services: `cache` and `engine` in this process, `up` and `demo` as processes of their own.

Owns the checks before a start, the child processes, and the rule by which a process that ended is started again. May import
show, console, kvkeeper.client and kvkeeper.common.service; the services' own modules only inside a function, when they are needed.
"""

"""Code that every room shares: experiences, runs of a task, ranks, files, this machine, protocols between rooms."""

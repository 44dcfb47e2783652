"""Pages that show a run, or compare several. They open from disk, without a server and without a script."""

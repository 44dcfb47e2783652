"""Where experiences are held: this process's memory, a file, or a database."""

"""What every room shares: experiences, configuration, and the protocols that cross rooms."""

"""What several test modules share: data, doubles, servers, processes."""

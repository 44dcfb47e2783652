"""What a run is configured by: light, without torch, so that a misspelt key is refused within a second."""

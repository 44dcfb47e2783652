"""What experiences are worth (add strategies), and what the policy makes of them (losses): plain torch."""

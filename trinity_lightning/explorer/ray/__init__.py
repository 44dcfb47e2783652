"""Runners in Ray actors; imported only with `explorer.runner=ray`."""

"""The configuration of a run: sections and their rules, without torch, so that a refusal takes less than a second."""

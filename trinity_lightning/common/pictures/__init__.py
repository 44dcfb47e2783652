"""Pictures of tasks, of prompts and of experiences."""

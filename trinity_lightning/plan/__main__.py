"""`python -m trinity_lightning.plan`: see `plan/command.py`."""

from trinity_lightning.plan.command import main

if __name__ == "__main__":
    main()

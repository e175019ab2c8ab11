"""``python -m metagrpo.trainer``."""

from metagrpo.trainer.cli import main

if __name__ == "__main__":
    main()

"""`python -m thawline`: the `thawline` command, for `torchrun -m` among others."""

from thawline.cli import main

if __name__ == "__main__":
    main()

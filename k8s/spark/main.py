"""What the Spark driver starts: the `thawline` command, as the file that spark-submit wants."""

from thawline.cli import main

if __name__ == "__main__":
    main()

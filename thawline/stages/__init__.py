"""What a container runs: paths in, paths out, each output whole or absent."""

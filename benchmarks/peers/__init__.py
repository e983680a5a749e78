"""What the benchmarks compare with, each written as a competent user of that tool would."""

"""What `thawline doctor` looks at: the machine, its storage, the servers, what a cluster holds.

Each look is a function that says in a sentence what it found, raises a `ThawlineError` with the
remedy, or `Skipped` with the reason. Imports that may fail stand inside, so that a missing package
is one line of the findings.
"""

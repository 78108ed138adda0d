"""Storage: atomic files, locks, the object store, snapshots, artifacts, and safe readers of other users' files."""

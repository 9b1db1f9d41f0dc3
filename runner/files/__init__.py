"""What every room writes and reads files with: whole files or none, JSON, pictures, and how values are shown."""

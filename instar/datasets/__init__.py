"""Export recorded sessions to files, import them, and convert them for other trainers."""

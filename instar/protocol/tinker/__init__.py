"""Tinker's wire protocol: protobuf as tinker 0.36 sends it, JSON as tinker 0.22 and MinT do."""

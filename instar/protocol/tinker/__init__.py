"""Tinker's wire protocol on a workshop: protobuf as tinker 0.36 speaks it, JSON as 0.22 and MinT do."""

"""Tinker's wire protocol: protobuf as sent by tinker 0.36 to 0.38, JSON as sent by tinker 0.22 and MinT."""

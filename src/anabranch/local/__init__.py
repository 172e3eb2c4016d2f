"""A local Kinesis that AWS's own clients believe: embedded in tests and the demo, or run as `anabranch serve`."""

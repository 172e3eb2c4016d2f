"""One file for each operation of the Kinesis API."""

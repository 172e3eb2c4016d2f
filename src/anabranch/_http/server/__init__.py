"""The HTTP server of the local Kinesis: HTTP/1.1 and HTTP/2 on one port."""

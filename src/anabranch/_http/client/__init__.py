"""The HTTP client: pooled HTTP/1.1 connections for whole responses, HTTP/1.1 or HTTP/2 for streamed ones."""

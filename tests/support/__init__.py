"""Helpers of several test modules: data, doubles, servers, processes."""

"""Clients for object stores."""

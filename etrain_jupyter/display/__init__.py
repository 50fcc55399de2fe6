"""Render numbers, tables and charts as plain text, HTML and SVG."""

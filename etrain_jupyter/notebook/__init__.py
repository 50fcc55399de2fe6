"""The notebook kernel: commands, editor support, the dashboard, jobs, and the audit."""

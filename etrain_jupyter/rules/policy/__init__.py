"""Policies: scaling, schedules, worker allocation, costs, and checkpoint intervals."""

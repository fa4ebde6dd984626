"""The paper's schedule: settings, the run, and what it reports."""

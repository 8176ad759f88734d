"""Several local rounds per cohort."""

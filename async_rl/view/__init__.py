"""What a run looks like from outside: one model, filled from the orchestrator's Status or from the bucket."""

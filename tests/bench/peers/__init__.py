"""Other people's trainers, run by an interpreter of their own, on the same models, samples and rewards as ours."""

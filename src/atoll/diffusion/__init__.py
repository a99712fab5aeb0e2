"""The mathematics: schedules, predictions, transfer between paths, objectives, solvers. Needs torch alone."""

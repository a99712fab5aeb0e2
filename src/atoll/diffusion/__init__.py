"""The mathematics: schedules, predictions, transfer between paths, objectives, solvers. Imports only torch."""

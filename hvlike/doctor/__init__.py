"""Why a job does not start, or not well: facts are collected, checks judge them, a report says what to do."""

"""What is right and what is not: every rung is a pure function from facts to a finding."""

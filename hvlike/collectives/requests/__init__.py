"""What ranks ask for and how it is compared: requests, plans, the message table. Pure logic, no messages."""

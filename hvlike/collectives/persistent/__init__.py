"""Operations that are agreed once and then run in every step without a message."""

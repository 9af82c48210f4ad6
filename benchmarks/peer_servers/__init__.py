"""Other model servers on the same emulated device, run by an interpreter that has them; they import no code of ours."""

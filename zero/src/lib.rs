//! ZeRO.

"""Tests of Tokenmill; what several of them share lies in `tests.support`."""
